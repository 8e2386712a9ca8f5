"""The three states of a question: how they are rendered, their Parquet files, and the prompts."""
