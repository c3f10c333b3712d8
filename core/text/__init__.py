"""Text around the engine: prompts to token ids, token ids back to text, stop strings.

Runs in the process that serves clients, never beside the model. Imports no torch.
"""
