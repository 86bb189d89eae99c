"""Fault injection: hurt a running job on purpose, to see that it survives.

`orders` is what may be asked for, `job` finds the processes and refuses all others, `acts` does the harm, `director`
waits for the moments, `command` is `recycle chaos`, `script` is `recycle run --chaos`. In the workers
`observe.holds` holds the training thread at precise moments; the engine knows nothing of any of this.
"""
