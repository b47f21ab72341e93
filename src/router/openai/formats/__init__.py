"""The forms in which models write tool calls and reasoning, and one reader of all of them. Pure; knows no HTTP."""
