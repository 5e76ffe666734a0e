package agentpb

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"
	"unicode/utf8"
)

// SelfPort is the vsock port of the host at which a guest may ask for something about its own VM, if its
// owner has allowed that. It sends one line, see SelfRequest, and gets one, see SelfAnswer.
const SelfPort = 1020

// What a guest may ask for.
const (
	SelfSleep    = "sleep"    // to be put to sleep
	SelfSnapshot = "snapshot" // a named snapshot, while it runs on
	SelfHold     = "hold"     // not to be put to sleep for want of use, for some time
	SelfWake     = "wake"     // to be woken at a time
	SelfExtend   = "extend"   // to last for some time yet
	SelfFork     = "fork"     // a child that goes on from this moment
)

// SelfWords are all of them.
func SelfWords() []string {
	return []string{SelfSleep, SelfSnapshot, SelfHold, SelfWake, SelfExtend, SelfFork}
}

// Bounds of the two lines, in bytes.
const (
	MaxSelfRequest = 1 << 10
	MaxSelfAnswer  = 4 << 10
	MaxSelfNote    = 256
)

// SelfRequest is what a guest asks for: a line of JSON. There is no way to name another VM.
type SelfRequest struct {
	Do string `json:"do"`
	// Note is kept with the snapshot, at most 256 bytes.
	Note string `json:"note,omitempty"`
	// Seconds is how long SelfHold holds, where 0 ends one, and how long SelfExtend lets it last from now on.
	Seconds int `json:"seconds,omitempty"`
	// At is when SelfWake wakes it; the zero time takes back what was asked for before.
	At time.Time `json:"at,omitzero"`
}

// SelfAnswer is what the host says to that. That a VM is about to sleep is said before it does.
type SelfAnswer struct {
	OK       bool   `json:"ok"`
	Error    string `json:"error,omitempty"`
	Snapshot string `json:"snapshot,omitempty"`
	Seconds  int    `json:"seconds,omitempty"`
	// Expires is when the VM's time is over, after SelfExtend; without it it lasts for ever.
	Expires time.Time `json:"expires,omitzero"`
	// Child is the name of the VM that SelfFork has made.
	Child string `json:"child,omitempty"`
}

// ErrSelf says that a line is no request.
var ErrSelf = errors.New("not a request that a guest may make")

// ParseSelfRequest reads a line, without its newline.
func ParseSelfRequest(line []byte) (r SelfRequest, err error) {
	if len(line) > MaxSelfRequest || !utf8.Valid(line) {
		return SelfRequest{}, fmt.Errorf("%w: %d bytes", ErrSelf, len(line))
	}
	d := json.NewDecoder(bytes.NewReader(line))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		return SelfRequest{}, fmt.Errorf("%w: %w", ErrSelf, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return SelfRequest{}, fmt.Errorf("%w: there is more after the JSON object", ErrSelf)
	}
	switch {
	case !slices.Contains(SelfWords(), r.Do):
		return SelfRequest{}, fmt.Errorf("%w: %q", ErrSelf, r.Do)
	case r.Do != SelfSnapshot && r.Note != "" || len(r.Note) > MaxSelfNote:
		return SelfRequest{}, fmt.Errorf("%w: a note of %d bytes for %s", ErrSelf, len(r.Note), r.Do)
	case r.Do != SelfHold && r.Do != SelfExtend && r.Seconds != 0 || r.Seconds < 0 || r.Do == SelfExtend && r.Seconds == 0:
		return SelfRequest{}, fmt.Errorf("%w: %d seconds for %s", ErrSelf, r.Seconds, r.Do)
	case r.Do != SelfWake && !r.At.IsZero():
		return SelfRequest{}, fmt.Errorf("%w: a time for %s", ErrSelf, r.Do)
	}
	return r, nil
}
