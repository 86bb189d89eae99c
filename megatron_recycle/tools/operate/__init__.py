"""Operator's tools for a running job: its status, its metrics, alarms, logs, and orders to it.

All of them run in processes of their own and read the files of the run's folder, or ask the coordinator. They never
block a worker.
"""
