package agentpb

import (
	"errors"
	"fmt"
	"strings"
)

// Ready is what the agent reports once, at ReadyPort, when it listens.
type Ready struct {
	Version string
	// VMCoreInfo is the physical address of the kernel's note on itself, and
	// VMCoreInfoSize its size in bytes, as /sys/kernel/vmcoreinfo has them; both are
	// 0 if there is none, or if the host is not to make use of it.
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

// Line is the report as it is sent: "ready VERSION", or "ready VERSION
// vmcoreinfo=ADDRESS+SIZE" with hexadecimal numbers, and a newline.
func (r Ready) Line() string {
	line := readyWord + r.Version
	if r.VMCoreInfoSize > 0 {
		line += fmt.Sprintf("%s%x+%x", vmcoreinfoWord, r.VMCoreInfo, r.VMCoreInfoSize)
	}
	return line + "\n"
}

// ParseReady reads a report, without its newline.
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
