package reset

import (
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/devices"
)

func newBus(t *testing.T, report Report) *devices.Bus {
	t.Helper()
	var bus devices.Bus
	if err := AddTo(&bus, report); err != nil {
		t.Fatal(err)
	}
	return &bus
}

func TestWrites_that_end_the_guest(t *testing.T) {
	for _, tc := range []struct {
		name string
		port uint64
		data []byte
		want []Kind
	}{
		{"keyboard controller: reset", 0x64, []byte{0xfe}, []Kind{Reset}},
		{"keyboard controller: all lines pulsed", 0x64, []byte{0xf0}, []Kind{Reset}},
		{"keyboard controller: nothing pulsed", 0x64, []byte{0xff}, nil},
		{"keyboard controller: other command", 0x64, []byte{0x20}, nil},
		{"keyboard controller: reset value at the data port", 0x60, []byte{0xfe}, nil},
		{"reset register: its value", ResetPort, []byte{ResetValue}, []Kind{Reset}},
		{"reset register: another value", ResetPort, []byte{2}, nil},
		{"sleep control: off", SleepControlPort, []byte{SleepTypeOff<<2 | 1<<5}, []Kind{PowerOff}},
		{"sleep control: off, reserved bits set", SleepControlPort, []byte{0xc3 | SleepTypeOff<<2 | 1<<5}, []Kind{PowerOff}},
		{"sleep control: type without enable", SleepControlPort, []byte{SleepTypeOff << 2}, nil},
		{"sleep control: another type", SleepControlPort, []byte{3<<2 | 1<<5}, nil},
		{"sleep status: cleared", SleepStatusPort, []byte{0x80}, nil},
		{"pvpanic: panicked", PVPanicPort, []byte{1}, []Kind{Panicked}},
		{"pvpanic: crash kernel", PVPanicPort, []byte{2}, []Kind{CrashLoaded}},
		{"pvpanic: both", PVPanicPort, []byte{3}, []Kind{Panicked, CrashLoaded}},
		{"pvpanic: unknown", PVPanicPort, []byte{0xfc}, nil},
		{"wider than the register", ResetPort, []byte{1, 0}, nil},
	} {
		var got []Kind
		bus := newBus(t, func(e Event) {
			if e.Via == "" || e.Kind.String() == "unknown" {
				t.Errorf("%s: event %v says too little", tc.name, e)
			}
			got = append(got, e.Kind)
		})
		bus.Write(tc.port, tc.data)
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s: got %v, want %v", tc.name, got, tc.want)
		}
	}
}

func TestWhat_reads_show(t *testing.T) {
	bus := newBus(t, func(e Event) { t.Errorf("a read caused %v", e) })
	for port, want := range map[uint64]byte{
		0x60: 0, 0x64: 1, ResetPort: 0, SleepControlPort: 0, SleepStatusPort: 0, PVPanicPort: 3,
	} {
		p := []byte{0xaa}
		if !bus.Read(port, p) || p[0] != want {
			t.Errorf("port %#x reads %#x, want %#x", port, p[0], want)
		}
	}
	// The interval timer's port is left alone.
	if bus.Read(0x61, []byte{0}) {
		t.Error("port 0x61 is taken")
	}
}

// i8042_flush of Linux reads data while the output buffer is full, at most 16
// times, and then takes it that there is no controller.
func TestLinux_keyboard_probe_gives_up_after_sixteen_reads(t *testing.T) {
	bus := newBus(t, func(Event) {})
	p := make([]byte, 1)
	for n := 0; ; n++ {
		bus.Read(0x64, p)
		if p[0]&1 == 0 {
			t.Fatal("the buffer could be emptied: Linux goes on to send commands and waits for each")
		}
		if p[0]&2 != 0 {
			t.Fatal("the input buffer is full: Linux waits before it resets")
		}
		if n == 16 {
			return
		}
	}
}

func TestPorts_cannot_be_added_twice(t *testing.T) {
	if err := AddTo(newBus(t, nil), nil); err == nil {
		t.Error("they were added twice")
	}
}
