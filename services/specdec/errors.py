"""Every error specdec raises on purpose.

SpecdecError
├── SettingsError          a flag, variable or file is wrong; the message names it
├── SetupError             the machine lacks something (a package, memory, shared memory)
├── ChannelError           the shared segment cannot be used
│   ├── SegmentMissing     no verifier has made it yet
│   ├── SegmentMismatch    made by another version, or not by specdec
│   └── SegmentInUse       another live process holds the role asked for
├── VocabularyMismatch     the draft's token ids are not the target's
├── SeamError              this vLLM is not the one the plug-ins were written for
└── PairError              a router cannot use a pair
    └── PairUnavailable    not connected, or its vLLM does not answer

A command line prints the message and exits with 2; nothing else about a SpecdecError is meant for a user.
"""


class SpecdecError(Exception):
    """Base of all errors specdec raises on purpose."""


class SettingsError(SpecdecError):
    """A flag, an environment variable or the settings file is wrong."""


class SetupError(SpecdecError):
    """The machine lacks something specdec needs."""


class ChannelError(SpecdecError):
    """The shared segment cannot be used."""


class SegmentMissing(ChannelError):
    """No verifier has made the segment yet, or it has been removed."""


class SegmentMismatch(ChannelError):
    """The file is not a segment of this version and these sizes."""


class SegmentInUse(ChannelError):
    """Another live process holds the role asked for."""


class VocabularyMismatch(SpecdecError):
    """The draft's token ids are not the target's."""


class SeamError(SpecdecError):
    """The installed vLLM is not one the plug-ins were written for."""


class PairError(SpecdecError):
    """A router cannot use a pair."""


class PairUnavailable(PairError):
    """The pair is not connected, or its vLLM server does not answer."""
