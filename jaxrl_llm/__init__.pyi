from jaxrl_llm.api import *  # noqa: F403

__version__: str
