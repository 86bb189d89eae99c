"""For those who look after a job while it runs: its status, its metrics, alarms, logs, and orders to it.

All of it runs in processes of its own and reads the files of the run's folder, or asks the coordinator; nothing of it
is in a worker's way.
"""
