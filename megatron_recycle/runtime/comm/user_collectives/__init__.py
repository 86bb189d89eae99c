"""Groups of the script's own that live as long as the job: their collectives give the values of all nominal members,
whoever is left.

A group keeps its size and its ranks. What its members call is carried out among those that are alive, and for a
position that is empty a peer of that stage answers, which has the same parameters, losses and flags by promise.
"""
