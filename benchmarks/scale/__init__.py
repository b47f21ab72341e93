"""What a model of several nodes can give, before there are any: from formulas, and from a simulation of the stages."""
