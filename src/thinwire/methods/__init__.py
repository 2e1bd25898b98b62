"""What papers have a name for: recipes of compressor, feedback and collective."""

from thinwire.methods.recipes import (
    BitQSGD,
    DeepGradientCompression,
    EFSignSGD,
    MethodLine,
    NamedMethod,
    OneBitSGD,
    Recipe,
    SignSGD,
    Signum,
    list_methods,
    method_of,
    parse,
)

__all__ = [
    "BitQSGD",
    "DeepGradientCompression",
    "EFSignSGD",
    "MethodLine",
    "NamedMethod",
    "OneBitSGD",
    "Recipe",
    "SignSGD",
    "Signum",
    "list_methods",
    "method_of",
    "parse",
]
