"""`make demo`: questions about long texts, answered by the whole service, and what each answer cost."""
