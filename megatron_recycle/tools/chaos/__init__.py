"""Fault injection: hurt a running job on purpose, to see that it survives.

`orders` defines the possible orders, `target_job` finds the processes and refuses all others, `acts` does the harm,
`director` waits for the moments, `command` is `recycle chaos`, `script` is `recycle run --chaos`. In the workers
`observe.holds` holds the training thread at precise moments; the engine is unaware of all of this.
"""
