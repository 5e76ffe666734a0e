package netpolicy

import (
	"encoding/binary"
	"net/netip"

	"github.com/cilium/ebpf"
)

// Engine is the programs without a TAP device, with a clock that tests set.
type Engine struct{ *engine }

func NewEngine(flows int, testing bool) (*Engine, error) {
	e, err := loadEngine(flows, testing)
	if err != nil {
		return nil, err
	}
	return &Engine{e}, nil
}

func (e *Engine) Close() error                 { return e.close() }
func (e *Engine) Install(s *Spec) error        { return e.install(s) }
func (e *Engine) SetTime(now uint64) error     { return e.objs.TestNow.Set(now) }
func (e *Engine) Counters() ([]Counter, error) { return e.counters() }
func (e *Engine) Pin(name string, a netip.Addr, until uint64) error {
	return e.pin(name, a, until)
}
func (e *Engine) Program(d Direction) *ebpf.Program {
	if d == Egress {
		return e.objs.FromGuest
	}
	return e.objs.ToGuest
}

// Table fills the map of a table, and drops it.
func (e *Engine) Table(s *Spec) error {
	m, err := e.build(s, 1)
	if err != nil {
		return err
	}
	return m.Close()
}

// ForgetFlows drops all flows.
func (e *Engine) ForgetFlows() error {
	var k [24]byte
	for e.objs.Flows.NextKey(nil, &k) == nil {
		if err := e.objs.Flows.Delete(k); err != nil {
			return err
		}
	}
	return nil
}

// ForgetState drops flows, the use of limits and pins.
func (e *Engine) ForgetState() error {
	if err := e.ForgetFlows(); err != nil {
		return err
	}
	clear(e.pins)
	e.gen++ // makes them old for a moment
	err := e.unpinOld()
	e.gen--
	if err != nil {
		return err
	}
	for i := range uint32(2) {
		if err := e.objs.Usages.Put(i, make([]byte, e.objs.Usages.ValueSize())); err != nil {
			return err
		}
	}
	return nil
}

// Context is struct __sk_buff as far as tests use it.
type Context [192]byte

const (
	ctxVLAN    = 20 // vlan_present
	ctxCB      = 48
	ctxGSOSize = 176
)

// Ran is what the programs did with a frame.
type Ran struct {
	Verdict Verdict
	Reason  Reason
	Rule    int // of the table; -1 is none
	Action  uint32
	Bytes   []byte
}

// Run runs a program on a frame.
func (e *Engine) Run(d Direction, frame []byte, gsoSize int) (Ran, error) {
	var in, out Context
	binary.LittleEndian.PutUint32(in[ctxGSOSize:], uint32(gsoSize))
	o := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256), Context: in[:], ContextOut: out[:]}
	action, err := e.Program(d).Run(&o)
	if err != nil {
		return Ran{}, err
	}
	cb := func(i int) uint32 { return binary.LittleEndian.Uint32(out[ctxCB+4*i:]) }
	r := Ran{Reason: Reason(cb(0)), Verdict: verdicts[cb(1)], Rule: int(cb(2)), Action: action, Bytes: o.DataOut}
	if r.Rule == 0xffff {
		r.Rule = -1
	}
	return r, nil
}

// Implicit is how many rules of the table come before the policy's.
func (p *Policy) Implicit() int { return p.implicit() }
