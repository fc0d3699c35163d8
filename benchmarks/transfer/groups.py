"""What methods are compared by."""

from enum import StrEnum


class Group(StrEnum):
    """What a method stands for. Where several of a group were measured, the fastest speaks for it."""

    OURS = "ours"
    TOKEN = "token"
    PAGE = "page"
    LARGE = "large"
    NIXL = "nixl"

    @property
    def label(self) -> str:
        return _LABELS[self]


_LABELS = {
    Group.OURS: "ours",
    Group.TOKEN: "one descriptor per token",
    Group.PAGE: "one descriptor per page",
    Group.LARGE: "descriptors of 1 MiB",
    Group.NIXL: "NIXL over UCX",
}
