"""Fault injection: hurt a running job on purpose, to see that it survives.

`orders` is what may be asked for, `job` finds the processes and refuses all others, `observer` runs in the workers
and holds them at precise moments, `acts` does the harm, `director` waits for the moments, `command` is
`recycle chaos`. The engine knows nothing of any of this.
"""
