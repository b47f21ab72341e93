"""The formats, one file each; `router.openai.formats.table` lists them."""
