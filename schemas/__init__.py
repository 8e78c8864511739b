"""The JSON Schemas, installed as batchgen.schemas. This file is load-bearing: an editable install needs it."""
