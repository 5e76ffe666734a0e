package state

import (
	"encoding/json"
	"fmt"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// LabelPolicy begins the names of the labels with the policy of a snapshot's VM: JSON, in pieces, since a label is
// shorter than a policy may be.
const (
	LabelPolicy = "drowse.policy."
	policyPiece = 48 << 10 // bytes
)

// labels returns the labels of a snapshot of a VM.
func (r *Record) labels(kind string) (map[string]string, error) {
	bare := *r
	bare.Spec.Policy, bare.Secrets, bare.Sleeps, bare.Confined = nil, nil, nil, false
	bare.DiskUsed = 0
	bare.Resumed, bare.Previous, bare.Left, bare.Former, bare.NextName, bare.Rotated = "", "", "", "", "", time.Time{}
	record, err := json.Marshal(&bare)
	if err != nil {
		return nil, err
	}
	labels := map[string]string{labelKind: kind, LabelRecord: string(record), labelOwner: r.ID}
	if r.Spec.Policy == nil {
		return labels, nil
	}
	text, err := json.Marshal(r.Spec.Policy)
	if err != nil {
		return nil, err
	}
	for i := 0; len(text) > 0; i++ {
		n := min(policyPiece, len(text))
		for n < len(text) && !utf8.RuneStart(text[n]) {
			n--
		}
		labels[LabelPolicy+strconv.Itoa(i)] = string(text[:n])
		text = text[n:]
	}
	return labels, nil
}

// PolicyOf returns the policy in the labels of a snapshot; nil if there is none.
func PolicyOf(labels map[string]string) (*netpolicy.Policy, error) {
	var text []byte
	for i := 0; ; i++ {
		piece, ok := labels[LabelPolicy+strconv.Itoa(i)]
		if !ok {
			break
		}
		text = append(text, piece...)
	}
	if text == nil {
		return nil, nil
	}
	p, err := netpolicy.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("%w: its network policy: %w", spec.ErrRecord, err)
	}
	return p, nil
}
