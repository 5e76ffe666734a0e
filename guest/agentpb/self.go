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

// SelfPort is the vsock port of the host where a guest makes requests about its own VM, if the owner has allowed
// that. The guest sends one line (SelfRequest) and gets one line back (SelfAnswer).
const SelfPort = 1020

// Requests that a guest may make.
const (
	SelfSleep    = "sleep"    // put the VM to sleep
	SelfSnapshot = "snapshot" // make a named snapshot while the VM runs on
	SelfHold     = "hold"     // do not put the idle VM to sleep, for some time
	SelfWake     = "wake"     // wake the VM at a time
	SelfExtend   = "extend"   // extend the VM's time
	SelfFork     = "fork"     // make a child that continues from this moment
)

// SelfWords returns all requests.
func SelfWords() []string {
	return []string{SelfSleep, SelfSnapshot, SelfHold, SelfWake, SelfExtend, SelfFork}
}

// Bounds of the two lines, in bytes.
const (
	MaxSelfRequest = 1 << 10
	MaxSelfAnswer  = 4 << 10
	MaxSelfNote    = 256
)

// SelfRequest is a guest's request: a line of JSON. It cannot name another VM.
type SelfRequest struct {
	Do string `json:"do"`
	// Note is stored with the snapshot, at most 256 bytes.
	Note string `json:"note,omitempty"`
	// Seconds is how long SelfHold holds (0 ends a hold), or how long from now SelfExtend lets the VM last.
	Seconds int `json:"seconds,omitempty"`
	// At is when SelfWake wakes the VM; the zero time cancels an earlier request.
	At time.Time `json:"at,omitzero"`
}

// SelfAnswer is the host's answer to a SelfRequest. If the VM is about to sleep, it gets the answer first.
type SelfAnswer struct {
	OK       bool   `json:"ok"`
	Error    string `json:"error,omitempty"`
	Snapshot string `json:"snapshot,omitempty"`
	Seconds  int    `json:"seconds,omitempty"`
	// Expires is when the VM's time ends, after SelfExtend; zero is never.
	Expires time.Time `json:"expires,omitzero"`
	// Child is the name of the VM that SelfFork has made.
	Child string `json:"child,omitempty"`
}

// ErrSelf says that a line is not a valid request.
var ErrSelf = errors.New("not a request that a guest may make")

// ParseSelfRequest parses and checks a line without its newline.
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
