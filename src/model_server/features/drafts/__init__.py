"""Several tokens in a step: drafts are guessed, checked in one forward, and accepted as far as they are right."""

# Requests get the same tokens as without (`window`). `lookup` guesses, `pace` decides how many pay, `speculator` joins
# them, `steps` is what the engine knows of it all.
