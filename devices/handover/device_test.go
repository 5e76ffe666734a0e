package handover

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/devices"
)

// guest is what an agent can do.
type guest struct {
	t   *testing.T
	bus devices.Bus
}

func newGuest(t *testing.T, d *Device) *guest {
	t.Helper()
	g := &guest{t: t}
	if err := d.AddTo(&g.bus); err != nil {
		t.Fatal(err)
	}
	return g
}

func (g *guest) in(reg uint64) byte {
	b := []byte{0xee}
	g.bus.Read(Port+reg, b)
	return b[0]
}

func (g *guest) command(v byte) { g.bus.Write(Port+Command, []byte{v}) }

func (g *guest) want(status byte) {
	g.t.Helper()
	if got := g.in(Status); got != status {
		g.t.Errorf("status is %d, want %d", got, status)
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestAgent_waits_until_it_is_released(t *testing.T) {
	d := New(nil)
	g := newGuest(t, d)
	g.command(CommandStandBy)
	g.want(StatusIdle)
	if d.StandingBy() {
		t.Error("it stands by, though nobody expects it")
	}
	for range 2 {
		arrived := d.Expect()
		g.want(StatusIdle)
		if closed(arrived) {
			t.Error("it has arrived before it came")
		}
		g.command(CommandStandBy)
		g.command(CommandStandBy)
		g.want(StatusWait)
		if !closed(arrived) || !d.StandingBy() {
			t.Error("it has not arrived")
		}
		d.Release()
		g.want(StatusGoOn)
		if d.StandingBy() {
			t.Error("it still stands by")
		}
		g.command(CommandStandBy)
		g.want(StatusGoOn)
	}
}

func restored(t *testing.T, at bool, event func(Event)) *Device {
	t.Helper()
	from, to := New(nil), New(event)
	if at {
		from.Expect()
		newGuest(t, from).command(CommandStandBy)
	}
	p, err := from.Export()
	if err != nil {
		t.Fatal(err)
	}
	if err := to.Import(p); err != nil {
		t.Fatal(err)
	}
	if to.StandingBy() != at {
		t.Errorf("standing by: %v, want %v", to.StandingBy(), at)
	}
	return to
}

func TestRestored_agent_gets_its_message_and_answers(t *testing.T) {
	for command, want := range map[byte]Answer{CommandDone: Done, CommandFailed: Failed, CommandAsk: Ask} {
		var events []Event
		var answer <-chan Answer
		d := restored(t, true, func(e Event) {
			events = append(events, e)
			if len(answer) != 0 {
				t.Errorf("event %d comes after the answer", e)
			}
		})
		g := newGuest(t, d)
		message := bytes.Repeat([]byte{7}, 100)
		asked := 0
		answer = d.Resume(func() []byte { asked++; return message })
		if asked != 0 {
			t.Error("the message was made before anybody asked for it")
		}
		for range 3 {
			g.want(StatusResumed)
		}
		var got []byte
		for range 102 {
			got = append(got, g.in(Data))
		}
		if want := append(bytes.Repeat([]byte{7}, 100), 0, 0); !bytes.Equal(got, want) || asked != 1 {
			t.Errorf("got %d after %d calls", got, asked)
		}
		if slices.ContainsFunc(message, func(b byte) bool { return b != 0 }) {
			t.Error("the message is still in memory")
		}
		g.command(command)
		g.command(CommandDone)
		if got := <-answer; got != want {
			t.Errorf("the answer is %v, want %v", got, want)
		}
		g.want(StatusIdle)
		if !slices.Equal(events, []Event{Reached, Answered}) {
			t.Errorf("events %v", events)
		}
	}
}

func TestRestored_agent_that_nobody_tells_anything_goes_on(t *testing.T) {
	for _, at := range []bool{true, false} {
		newGuest(t, restored(t, at, nil)).want(StatusGoOn)
	}
	d := restored(t, true, nil)
	g := newGuest(t, d)
	answer := d.Resume(func() []byte { return []byte{1} })
	d.Release()
	g.want(StatusGoOn)
	g.command(CommandDone)
	if g.in(Data) != 0 || len(answer) != 0 {
		t.Error("it got a message or gave an answer after its release")
	}
}

func TestHostile_guest_gets_nothing(t *testing.T) {
	d := New(nil)
	g := newGuest(t, d)
	for v := range 256 {
		g.command(byte(v))
		g.want(StatusIdle)
		if got := g.in(Data); got != 0 {
			t.Fatalf("data is %d", got)
		}
	}
	d = restored(t, true, nil)
	g = newGuest(t, d)
	d.Resume(func() []byte { return make([]byte, MaxMessage+1) })
	for _, size := range []int{2, 3} {
		b := bytes.Repeat([]byte{0xee}, size)
		g.bus.Read(Port, b)
		if !bytes.Equal(b, make([]byte, size)) {
			t.Errorf("%d bytes at once: % x", size, b)
		}
		g.bus.Write(Port, b)
	}
	g.in(Data)
	if len(d.data) != MaxMessage-1 {
		t.Errorf("%d bytes of message are left of %d", len(d.data), MaxMessage)
	}
}

func TestImport_refuses_what_is_no_state(t *testing.T) {
	for name, p := range map[string]devices.Payload{
		"another kind":    {Kind: "x", Version: 1, Data: []byte{0}},
		"another version": {Kind: stateKind, Version: 2, Data: []byte{0}},
		"nothing":         {Kind: stateKind, Version: 1},
		"too much":        {Kind: stateKind, Version: 1, Data: []byte{1, 1}},
		"no boolean":      {Kind: stateKind, Version: 1, Data: []byte{2}},
	} {
		if err := New(nil).Import(p); !errors.Is(err, devices.ErrPayload) {
			t.Errorf("%s: got %v, want ErrPayload", name, err)
		}
	}
}
