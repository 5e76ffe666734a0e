package vmm

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/handover"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

const (
	messageAt   = counterAt + 0x1000
	messageSize = 100
)

// agent stands by, takes a message if it finds itself restored, and then counts without end.
func agent() []byte {
	code := out8(handover.Port+handover.Command, handover.CommandStandBy)
	code = append(code,
		0x66, 0xba, handover.Port&0xff, handover.Port>>8, // mov dx,status
		0xec,                      // in al,dx
		0x3c, handover.StatusWait, // cmp al,wait
		0x74, 0xfb, // je to the in
		0x3c, handover.StatusResumed, // cmp al,resumed
	)
	take := []byte{
		0x66, 0xba, (handover.Port + handover.Data) & 0xff, handover.Port >> 8, // mov dx,data
		0x48, 0xc7, 0xc7, 0, messageAt >> 8 & 0xff, 0, messageAt >> 24, // mov rdi,messageAt
		0x48, 0xc7, 0xc1, messageSize, 0, 0, 0, // mov rcx,messageSize
		0xf3, 0x6c, // rep insb
	}
	take = append(take, out8(handover.Port+handover.Command, handover.CommandDone)...)
	code = append(code, 0x75, byte(len(take))) // jne beyond
	return slices.Concat(code, take, counting)
}

func quietTime(m *Machine) bool {
	m.quiet.mu.Lock()
	defer m.quiet.mu.Unlock()
	return m.quiet.on && !m.quiet.over
}

func TestAgent_that_stands_by_is_brought_up_to_date_when_it_is_restored(t *testing.T) {
	a := newMachine(t, testConfig{VCPUs: 1})
	ready := a.Handover().Expect()
	start(t, a, agent()...)
	select {
	case <-ready:
	case <-time.After(30 * time.Second):
		t.Fatal("the agent does not stand by")
	}
	if err := a.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	states, err := a.Export()
	if err != nil {
		t.Fatal(err)
	}
	if counter(t, a) != 0 {
		t.Error("the agent has not waited")
	}
	other := slices.DeleteFunc(slices.Clone(states), func(s State) bool { return s.Name == "handover" })
	message := bytes.Repeat([]byte{7}, messageSize)
	for name, tc := range map[string]struct {
		states []State
		told   bool
	}{
		"told":                      {states, true},
		"told nothing":              {states, false},
		"saved by an older version": {other, false},
	} {
		t.Run(name, func(t *testing.T) {
			b := newMachine(t, testConfig{VCPUs: 1})
			page := make([]byte, 1<<20)
			for gpa := guestmem.GPA(0); gpa < 64<<20; gpa += 1 << 20 {
				if err := a.Memory().Read(gpa, page); err != nil {
					t.Fatal(err)
				}
				if err := b.Memory().Write(gpa, page); err != nil {
					t.Fatal(err)
				}
			}
			if err := b.Import(tc.states); err != nil {
				t.Fatal(err)
			}
			var answer <-chan handover.Answer
			if tc.told {
				// Only the answer may end the time in which interrupts are held back.
				defer func(d time.Duration) { quietLimit = d }(quietLimit)
				quietLimit = time.Hour
				if !b.Handover().StandingBy() {
					t.Fatal("the agent does not stand by")
				}
				answer = b.Handover().Resume(func() []byte { return bytes.Clone(message) })
			}
			if err := b.Start(); err != nil {
				t.Fatal(err)
			}
			waitCount(t, b, 0)
			// An answer ends the time in which interrupts are held back; so does its limit.
			for deadline := time.Now().Add(30 * time.Second); quietTime(b); time.Sleep(time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatal("interrupts are kept back for good")
				}
			}
			got := make([]byte, messageSize)
			if err := b.Memory().Read(messageAt, got); err != nil {
				t.Fatal(err)
			}
			if !tc.told {
				if !bytes.Equal(got, make([]byte, messageSize)) {
					t.Errorf("it got a message: % x", got)
				}
				return
			}
			if <-answer != handover.Done || !bytes.Equal(got, message) {
				t.Errorf("it got % x", got)
			}
			d := b.Stages().Durations()
			if d[StageAgentReached] <= 0 || d[StageAgentAnswer] <= 0 {
				t.Errorf("stages %v", d)
			}
		})
	}
	a.Handover().Release()
	if err := a.Resume(); err != nil {
		t.Fatal(err)
	}
	waitCount(t, a, 0)
	var _ devices.Stateful = a.Handover()
}
