package handover

import (
	"fmt"
	"sync"

	"github.com/drowse-vm/drowse/devices"
)

// The device's I/O ports.
const (
	Port  = 0x620
	Ports = 3
)

// Offsets of the device's registers.
const (
	Status  = 0
	Data    = 1
	Command = 2
)

// Values of the status register.
const (
	StatusIdle    = 0 // the VMM does not wait for the agent
	StatusWait    = 1 // the agent must stay
	StatusGoOn    = 2 // the VMM has taken the capture, or given it up
	StatusResumed = 3 // this is a restored guest, and there is a message
)

// Values of the command register.
const (
	CommandStandBy = 1 // the agent stands by
	CommandDone    = 2 // the agent has done what the message says
	CommandFailed  = 3 // the agent has not done it, or not all of it
	CommandAsk     = 4 // the agent has done it, and has more to say: the VMM must ask
)

// Answer is the answer of a restored guest's agent.
type Answer byte

// Answers.
const (
	Failed Answer = CommandFailed
	Done   Answer = CommandDone
	Ask    Answer = CommandAsk
)

// MaxMessage bounds a message, in bytes.
const MaxMessage = 4096

// Event is a step of a restored guest.
type Event int

// Steps.
const (
	// Reached means that the agent of a restored guest has read the status for the first time.
	Reached Event = iota
	// Answered means that the agent has answered.
	Answered
)

// Device is the three ports. Any goroutine may call its methods.
type Device struct {
	event func(Event)

	mu      sync.Mutex
	status  byte
	at      bool          // the agent stands by
	arrival chan struct{} // set while the agent is expected; closed when it stands by
	answer  chan Answer   // set while an answer is expected
	reached bool
	message func() []byte
	data    []byte
}

// New makes a device. It calls event, if not nil, on the thread of a vCPU. event must not block.
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

// Expect lets the agent stand by until Release. The channel closes when the agent does.
func (d *Device) Expect() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.release(StatusIdle)
	d.arrival = make(chan struct{})
	return d.arrival
}

// Release lets the agent go on, and ends its standing by. An answer that has not come by now never comes.
func (d *Device) Release() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.release(StatusGoOn)
}

func (d *Device) release(status byte) {
	clear(d.data)
	d.status, d.at, d.arrival, d.answer, d.message, d.data = status, false, nil, nil, nil, nil
}

// StandingBy reports whether the agent stands by, in this guest or in the one whose state was imported.
func (d *Device) StandingBy() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.at
}

// Resume tells the agent of a restored guest that it is one. The agent must stand by. Without Resume it takes
// itself for the captured one. The device calls message once, when the agent asks for it. message returns at most
// MaxMessage bytes. The channel gets one answer.
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
			// The message has random numbers, which must not stay in memory.
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
			// First: the receiver of the answer may look for what the event has recorded.
			d.event(Answered)
			d.answer <- Answer(p[0])
			d.release(StatusIdle)
		}
	}
}
