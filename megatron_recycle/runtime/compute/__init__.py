"""The arithmetic of one stage on one worker; no communication."""
