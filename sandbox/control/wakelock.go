package control

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

// DismissTime is how long a sleep waits for the holders of the VM to tell its guest that their connections end. A
// guest that is not told still believes in them when it wakes.
const DismissTime = time.Second

// The lines of the answer to a hold. The VM's network, if it has one, follows on the first line.
const (
	HoldGranted = "held"
	HoldEnds    = "ends\n"
	// MaxHoldLine is the most bytes of such a line.
	MaxHoldLine = 64 << 10
)

// ParseHeld reads the first line of the answer.
func ParseHeld(line []byte) (*spec.NetworkInfo, error) {
	word, rest, more := bytes.Cut(bytes.TrimSuffix(line, []byte("\n")), []byte(" "))
	if string(word) != HoldGranted {
		return nil, fmt.Errorf("it answers %.80q, want that it holds", line)
	}
	if !more {
		return nil, nil
	}
	var n spec.NetworkInfo
	if err := json.Unmarshal(rest, &n); err != nil {
		return nil, fmt.Errorf("reading which network it has: %w", err)
	}
	return &n, nil
}
