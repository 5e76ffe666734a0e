package agentpb

import "time"

const (
	// AgentPort is the vsock port on which the agent listens.
	AgentPort = 1024
	// ReadyPort is the vsock port of the host (CID 2) that the agent dials once, when it listens. It sends one line:
	// see Ready.
	ReadyPort = 1023
	// HooksPort is the vsock port of the host that the agent dials when hooks have appeared or are gone. It sends
	// "hooks 1\n" or "hooks 0\n", and waits for one byte.
	HooksPort = 1022

	// MaxChunk bounds the data in one stream message, in bytes.
	MaxChunk = 32 << 10
	// Window is how many data messages in one direction of a stream may be unacknowledged. It is half of what ttrpc
	// buffers for a stream.
	Window = 32
	// AckEvery is the number of data messages after which a receiver acknowledges.
	AckEvery = 8
	// MaxMessage bounds every ttrpc message that the host accepts, in bytes.
	MaxMessage = 512 << 10

	// MinEntropy is the minimum size of one entropy delivery, in bytes.
	MinEntropy = 32
	// NoTransfer is the agent's error for a kind of transfer that it does not know.
	NoTransfer = "the first message must say what to transfer"

	// MaxPath is Linux's PATH_MAX without its terminating zero byte.
	MaxPath = 4095
	// MaxAttributes bounds the extended attributes of a file that its description has, with their names, in bytes.
	MaxAttributes = 8 << 10
	// MaxID bounds the name of a process, in bytes.
	MaxID = 64
	// MaxHostname is the kernel's limit (__NEW_UTS_LEN), in bytes.
	MaxHostname = 64
	// MaxWatchPaths bounds the files and directories that one watch names, and MaxWatchEvents the events in one
	// message.
	MaxWatchPaths  = 64
	MaxWatchEvents = 128
	// MaxDropPaths bounds the paths of one Drop, MaxDropTime its time limit, and MaxDropProblem the description of a
	// failure, in bytes.
	MaxDropPaths   = 64
	MaxDropTime    = 10 * time.Minute
	MaxDropProblem = 512
	// MaxDirEntries is the most entries in one ReadDir answer.
	MaxDirEntries = 256
	// DefaultOutputLimit and MaxOutputLimit bound the output kept for a detached process, in bytes.
	DefaultOutputLimit = 256 << 10
	MaxOutputLimit     = 16 << 20

	// MaxTerminalModes bounds the encoded modes of a terminal, in bytes. There are 256 opcodes, each 5 bytes long
	// with its argument.
	MaxTerminalModes = 1 << 10

	// MaxStatsItems bounds each list (file systems, interfaces, disks) in an answer to Stats; MaxStatsPath and
	// MaxStatsName bound their texts, in bytes.
	MaxStatsItems = 64
	MaxStatsPath  = 255
	MaxStatsName  = 32

	// MaxHookFailures bounds the failures in one answer: those of 64 hooks and their counterparts. The other bounds
	// are in bytes.
	MaxHookFailures = 128
	MaxHookName     = 255
	MaxHookProblem  = 256
	MaxHookOutput   = 1 << 10
)

// Events of hooks.
const (
	HookSleep    = "sleep"
	HookSnapshot = "snapshot"
	HookWake     = "wake"
	HookClone    = "clone"
	HookFreeze   = "freeze"
	HookThaw     = "thaw"
)

// States of a path in an answer to Drop.
const (
	DropAbsent    = "absent"
	DropEmpty     = "empty"
	DropDirectory = "directory"
	DropFile      = "file"
	DropOther     = "other"
	DropLink      = "link"
	DropReplaced  = "replaced"
)

// SubsystemSFTP is the agent's own program for file transfer.
const SubsystemSFTP = "sftp"

// SubsystemLayer is the agent's own program that ends all other processes and writes the machine's changes as an
// image layer.
const SubsystemLayer = "layer"
