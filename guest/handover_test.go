package guest_test

import (
	"bytes"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/devices/handover"
	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/agentpb"
)

// ports leads the agent to a device in this process.
type ports struct {
	device *handover.Device
	open   bool
}

func (p *ports) Open() error { p.open = true; return nil }
func (p *ports) Close()      { p.open = false }

func (p *ports) Command(v byte) { p.device.WriteIO(agentpb.HandoverCommand, []byte{v}) }

func (p *ports) Wait() byte {
	for {
		b := []byte{0}
		if p.device.ReadIO(agentpb.HandoverStatus, b); b[0] != agentpb.StatusWait {
			return b[0]
		}
		runtime.Gosched()
	}
}

func (p *ports) Message(m *[agentpb.HandoverSize]byte) {
	for i := range m {
		p.device.ReadIO(agentpb.HandoverData, m[i:i+1])
	}
}

// handOver has the agent stand by, and returns a channel for the error of the call.
func handOver(t *testing.T, v *vm) <-chan error {
	t.Helper()
	c := v.dial(t)
	ready := v.ports.device.Expect()
	done := make(chan error, 1)
	go func() { done <- c.Handover(t.Context()) }()
	select {
	case <-ready:
	case err := <-done:
		t.Fatalf("the agent does not stand by: %v", err)
	}
	return done
}

func TestHandover_of_the_guest_that_goes_on_changes_nothing(t *testing.T) {
	v := startVM(t)
	for range 2 {
		done := handOver(t, v)
		v.ports.device.Release()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	if v.machine.wall != 0 || v.machine.entropy != nil || v.ports.open {
		t.Errorf("the machine got %+v, ports open: %v", v.machine, v.ports.open)
	}
}

func TestHandover_of_a_restored_guest_brings_it_up_to_date(t *testing.T) {
	r := guest.Resume{Wall: time.Unix(1700000000, 123456789), Entropy: bytes.Repeat([]byte{7}, guest.HandoverEntropy), NewIdentity: true, Hostname: "clone"}
	message, err := r.Handover()
	if err != nil {
		t.Fatal(err)
	}
	v := startVM(t)
	done := handOver(t, v)
	var made time.Time
	answer := v.ports.device.Resume(func() []byte { made = time.Now(); return message })
	if a := <-answer; a == handover.Failed {
		t.Error("the agent says that it has failed")
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if v.machine.asOf.IsZero() || v.machine.asOf.After(made) {
		t.Errorf("the message was made at %v, and the agent takes it for one of %v: what it does meanwhile makes the clock late", made, v.machine.asOf)
	}
	if v.machine.wall != r.Wall.UnixNano() || !bytes.Equal(v.machine.entropy, r.Entropy) || v.machine.host != "clone" {
		t.Errorf("the machine got %+v", v.machine)
	}
	info, err := v.dial(t).Ping(t.Context())
	if err != nil || info.BootID != "11111111-2222-4333-8444-555555555555" {
		t.Errorf("boot id %q, %v", info.BootID, err)
	}
}

func TestHandover_with_a_message_that_is_none_fails_and_leaves_the_agent_alive(t *testing.T) {
	v := startVM(t)
	done := handOver(t, v)
	answer := v.ports.device.Resume(func() []byte { return nil })
	if a := <-answer; a != handover.Failed {
		t.Error("the agent says that it has done it")
	}
	if err := <-done; err == nil || !strings.Contains(err.Error(), "not a handover message") {
		t.Errorf("got %v", err)
	}
	if v.machine.wall != 0 || v.machine.entropy != nil {
		t.Errorf("the machine got %+v", v.machine)
	}
	if _, err := v.dial(t).Ping(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestHandover_that_nobody_waits_for_fails(t *testing.T) {
	v := startVM(t)
	if err := v.dial(t).Handover(t.Context()); err == nil || !strings.Contains(err.Error(), "does not wait") {
		t.Errorf("got %v", err)
	}
}

func TestResume_handover_refuses_what_does_not_fit(t *testing.T) {
	for name, r := range map[string]guest.Resume{
		"little entropy":   {Entropy: make([]byte, guest.HandoverEntropy-1)},
		"a long host name": {Entropy: make([]byte, guest.HandoverEntropy), Hostname: strings.Repeat("h", 65)},
	} {
		if _, err := r.Handover(); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
