"""Several tokens in a step: drafts are guessed, checked in one forward, and accepted as far as they are right.

The tokens of a request are those that it gets without drafts, whatever the drafts are (`window`). `lookup` guesses,
`pace` decides how many guesses pay, `speculator` puts them together.
"""
