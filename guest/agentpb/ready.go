package agentpb

import (
	"errors"
	"fmt"
	"strings"
)

// Ready is the agent's report, sent once to ReadyPort, that it listens.
type Ready struct {
	Version string
	// VMCoreInfo is the physical address of the kernel's vmcoreinfo note, and VMCoreInfoSize its size in bytes, as
	// in /sys/kernel/vmcoreinfo. Both are 0 if there is none, or if the host must not use it.
	VMCoreInfo, VMCoreInfoSize uint64
}

// ErrReady says that a line is not a report of readiness.
var ErrReady = errors.New("not a report of readiness")

// MaxReadyLine bounds the report, in bytes.
const MaxReadyLine = 256

const (
	readyWord      = "ready "
	vmcoreinfoWord = " vmcoreinfo="
)

// Line returns the report in its wire form: "ready VERSION", or "ready VERSION vmcoreinfo=ADDRESS+SIZE" with
// hexadecimal numbers, and a newline.
func (r Ready) Line() string {
	line := readyWord + r.Version
	if r.VMCoreInfoSize > 0 {
		line += fmt.Sprintf("%s%x+%x", vmcoreinfoWord, r.VMCoreInfo, r.VMCoreInfoSize)
	}
	return line + "\n"
}

// ParseReady parses a report without its newline.
func ParseReady(line string) (r Ready, err error) {
	rest, ok := strings.CutPrefix(line, readyWord)
	if !ok {
		return r, ErrReady
	}
	var word string
	r.Version, word, ok = strings.Cut(rest, vmcoreinfoWord)
	if !ok {
		return r, nil
	}
	var end string
	if n, _ := fmt.Sscanf(word, "%x+%x%s", &r.VMCoreInfo, &r.VMCoreInfoSize, &end); n != 2 {
		return Ready{}, fmt.Errorf("%w: it says vmcoreinfo=%q", ErrReady, word)
	}
	return r, nil
}
