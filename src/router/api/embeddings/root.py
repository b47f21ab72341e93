"""The body of `/` and `/invocations` of a model that embeds."""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Field, Tag

from router.api.embeddings.inputs import InputField
from router.api.embeddings.schema import EmbedBody, SimilarityInputs, SimilarityParameters


class RootBody(EmbedBody):
    """Take what TEI's /embed takes, or the sentences of its /similarity."""

    inputs: Annotated[
        Annotated[SimilarityInputs, Tag("sentences")] | Annotated[InputField, Tag("texts")],
        Discriminator(lambda value: "sentences" if isinstance(value, dict | SimilarityInputs) else "texts"),
    ] = Field(..., description="Texts as of /embed, or the object of /similarity.", examples=["What is rain?"])
    parameters: SimilarityParameters | None = Field(None, description="How sentences are read.")
