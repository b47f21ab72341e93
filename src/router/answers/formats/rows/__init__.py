"""The formats, one file each; `router.answers.formats.table` lists them."""
