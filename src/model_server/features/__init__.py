"""What some models have beside text, a folder each; `batch.feature` has the questions that the engine asks them."""
