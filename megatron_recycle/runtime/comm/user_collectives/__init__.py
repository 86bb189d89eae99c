"""The script's own groups, which live as long as the job: their collectives give the values of all nominal members,
whatever the membership.

A group keeps its size and its ranks. Its members' calls are carried out among the living ones. For an empty position a
peer of that stage answers, which has the same parameters, losses and flags by promise.
"""
