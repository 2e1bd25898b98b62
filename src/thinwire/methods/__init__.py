"""What papers have a name for: recipes of compressor, feedback and collective."""

from thinwire.methods.recipes import Recipe, list_methods, recipe_of

__all__ = ["Recipe", "list_methods", "recipe_of"]
