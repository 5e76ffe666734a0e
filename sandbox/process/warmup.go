package process

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/netip"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/jail"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// warmUp runs, with made-up data, the slow first-time work of a wake between its order and the report: decoders
// and encoders analyze types, and code is read from its file. It touches no file and no guest.
func warmUp() error {
	policy := &netpolicy.Policy{Rules: []netpolicy.Rule{{Direction: netpolicy.Egress, Verdict: netpolicy.Allow, Groups: []netpolicy.Group{netpolicy.Host}}}}
	now := time.Now().UTC()
	r := &state.Record{
		Version: state.RecordVersion, ID: spec.NewID(), Created: now, Phase: state.Asleep, Exit: &state.ExitRecord{}, Fork: &state.Origin{}, Awake: now, Rotated: now,
		Sleeps: []state.SleepRecord{{Asleep: now}},
		Spec:   spec.VM{Name: "warm-up", Network: spec.NetworkTAP, Policy: policy, Hooks: spec.Hooks{}, Idle: spec.Idle{SleepSeconds: 1}},
	}
	data, err := state.EncodeRecord(r)
	if err != nil {
		return err
	}
	read, err := state.DecodeRecord(data)
	if err != nil {
		return err
	}
	again, err := state.EncodeRecord(read)
	if err == nil && !bytes.Equal(data, again) {
		err = errors.New("a record is not read as it was written")
	}
	if err != nil {
		return err
	}
	p := &process{r: read, log: slog.New(slog.NewTextHandler(io.Discard, nil)), ended: make(chan struct{})}
	if err := p.control().Close(); err != nil {
		return err
	}
	p.log.Info("warm-up", "address", netip.IPv4Unspecified(), "begun", now)
	if _, err := netpolicy.Compile(read.Spec.Policy, netpolicy.Identity{Address4: netpolicy.TheWire.Guest4}, netpolicy.Environment{}); err != nil {
		return err
	}
	report := control.Report{Name: "warm-up", Begun: now, Stages: map[string]float64{"resume_ready": 1}, Network: &spec.NetworkInfo{Address: netpolicy.TheWire.Guest4}}
	return errors.Join(json.NewEncoder(io.Discard).Encode(report), jail.WarmUp())
}
