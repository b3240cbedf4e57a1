"""The course's public address, and the addresses that follow from it."""

from dataclasses import dataclass

from instructor import colab

PLACEHOLDER = "/OWNER/"
PAGES_BRANCH = "gh-pages"  # .github/workflows/site.yml publishes the site on this branch.


@dataclass(frozen=True)
class Repository:
    """The course's repository. While its owner is a placeholder, nothing links to it."""

    address: str  # such as https://github.com/owner/distributed-training-course

    @property
    def is_known(self) -> bool:
        return PLACEHOLDER not in self.address + "/"

    @property
    def name(self) -> str:
        """Return the owner and the name, such as owner/distributed-training-course."""
        return "/".join(self.address.split("/")[-2:])

    def shows(self, path: str) -> str:
        """Return the address that shows a file, or "" if it is not known."""
        return f"{self.address}/blob/main/{path}" if self.is_known else ""

    def edits(self, path: str) -> str:
        """Return the address at which a file can be edited, or "" if it is not known."""
        return f"{self.address}/edit/main/{path}" if self.is_known else ""

    def opens_in_colab(self, path: str) -> str:
        """Return the address that opens the Colab copy of a notebook, or "" if it is not known.

        Colab opens notebooks from GitHub. The copies are part of the site, and so of the branch that publishes it.
        """
        colab_address = "https://colab.research.google.com/github"
        return f"{colab_address}/{self.name}/blob/{PAGES_BRANCH}/colab/{path}" if self.is_known else ""


def declared() -> Repository:
    """Return the repository that pyproject.toml names."""
    return Repository(colab.address())
