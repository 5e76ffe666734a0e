package handover

import (
	"fmt"
	"sync"

	"github.com/drowse-vm/drowse/devices"
)

// Where the device is, in I/O ports.
const (
	Port  = 0x620
	Ports = 3
)

// Offsets of its registers.
const (
	Status  = 0
	Data    = 1
	Command = 2
)

// Values of the status register.
const (
	StatusIdle    = 0 // nobody waits for the agent
	StatusWait    = 1 // stay
	StatusGoOn    = 2 // the capture has been taken, or given up
	StatusResumed = 3 // this is a restored guest, and there is a message
)

// Values of the command register.
const (
	CommandStandBy = 1 // the agent stands by
	CommandDone    = 2 // what the message says has been done
	CommandFailed  = 3 // it has not, or not all of it
	CommandAsk     = 4 // it has been done, and the agent has more to say: ask it
)

// Answer is what the agent of a restored guest says.
type Answer byte

// Answers.
const (
	Failed Answer = CommandFailed
	Done   Answer = CommandDone
	Ask    Answer = CommandAsk
)

// MaxMessage bounds a message, in bytes.
const MaxMessage = 4096

// Event is a step on the way of a restored guest.
type Event int

// The steps.
const (
	// Reached is when the agent of a restored guest looks at the status for the first time.
	Reached Event = iota
	// Answered is when it has answered.
	Answered
)

// Device is the three ports. Its methods may be called from any goroutine.
type Device struct {
	event func(Event)

	mu      sync.Mutex
	status  byte
	at      bool          // the agent stands by
	arrival chan struct{} // while the agent is expected; closed when it comes
	answer  chan Answer   // while an answer is expected
	reached bool
	message func() []byte
	data    []byte
}

// New makes one. event, if not nil, is called on the thread of a vCPU and must not block.
func New(event func(Event)) *Device {
	if event == nil {
		event = func(Event) {}
	}
	return &Device{event: event}
}

// AddTo puts the ports on a bus.
func (d *Device) AddTo(bus *devices.Bus) error {
	if err := bus.Add(Port, Ports, d); err != nil {
		return fmt.Errorf("adding the handover ports: %w", err)
	}
	return nil
}

// Expect lets the agent stand by, until Release. The channel is
// closed when it does.
func (d *Device) Expect() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.release(StatusIdle)
	d.arrival = make(chan struct{})
	return d.arrival
}

// Release lets the agent go on, and not stand by any more. An answer that has
// not come by now does not come.
func (d *Device) Release() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.release(StatusGoOn)
}

func (d *Device) release(status byte) {
	clear(d.data)
	d.status, d.at, d.arrival, d.answer, d.message, d.data = status, false, nil, nil, nil, nil
}

// StandingBy says whether the agent stands by, in this guest or in the one whose state
// was imported.
func (d *Device) StandingBy() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.at
}

// Resume tells the agent of a restored guest, which must stand by, that it is one;
// without it the agent takes itself for the one that was captured. message is called once,
// when the agent asks for it, and returns at most MaxMessage bytes. The channel gets one
// answer.
func (d *Device) Resume(message func() []byte) <-chan Answer {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.status, d.message, d.answer = StatusResumed, message, make(chan Answer, 1)
	return d.answer
}

// ReadIO implements [devices.IO].
func (d *Device) ReadIO(off uint64, p []byte) {
	clear(p)
	if len(p) != 1 {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	switch off {
	case Status:
		p[0] = d.status
		if d.status == StatusResumed && !d.reached {
			d.reached = true
			d.event(Reached)
		}
	case Data:
		if d.message != nil {
			d.data = d.message()
			d.data = d.data[:min(len(d.data), MaxMessage)]
			d.message = nil
		}
		if len(d.data) > 0 {
			p[0] = d.data[0]
			// It has random numbers: they are not to lie about.
			d.data[0] = 0
			d.data = d.data[1:]
		}
	}
}

// WriteIO implements [devices.IO].
func (d *Device) WriteIO(off uint64, p []byte) {
	if off != Command || len(p) != 1 {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	switch p[0] {
	case CommandStandBy:
		if d.arrival != nil && !d.at {
			d.status, d.at = StatusWait, true
			close(d.arrival)
		}
	case CommandDone, CommandFailed, CommandAsk:
		if d.status == StatusResumed && d.answer != nil {
			// First: whoever gets the answer may look for what the event has noted.
			d.event(Answered)
			d.answer <- Answer(p[0])
			d.release(StatusIdle)
		}
	}
}
