package instance

import (
	"fmt"

	virtionet "github.com/drowse-vm/drowse/devices/net"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// All guests have the same address and the same gateway, which is also their name server: a clone keeps them. The
// programs on a VM's TAP device translate.
var guestAddress = fmt.Sprintf("%v/30,%v,%v", netpolicy.TheWire.Guest4, netpolicy.TheWire.Gateway4, netpolicy.TheWire.Gateway4)

// guestAddress6 is the same for IPv6, if a VM has it. Guests query names over IPv4.
var guestAddress6 = fmt.Sprintf("%v/64,%v", netpolicy.TheWire.Guest6, netpolicy.TheWire.Gateway6)

// netStart is the state in which a guest first finds its network.
type netStart int

const (
	// netOpen: the guest boots, once the policy is in force.
	netOpen netStart = iota
	// netHeld: the link is as the guest left it, and its packets wait for the policy. If the link went down and up,
	// Linux would drop packets until it had noticed both, among them the answer to the packet that woke the guest.
	netHeld
	// netDown: the guest's packets are dropped until it has its own identity, since another machine would send the
	// same.
	netDown
)

// connect makes the guest's end of the network.
func (in *Instance) connect(start netStart) (*virtionet.Device, error) {
	if in.parts.TAP == nil || in.parts.LinkReady == nil {
		return nil, fmt.Errorf("connecting the VM's network: %w: Parts.TAP and Parts.LinkReady must be set", spec.ErrInvalid)
	}
	return virtionet.New(in.mem, in.parts.TAP, virtionet.Config{
		MAC: netpolicy.TheWire.GuestMAC, LinkDown: start == netDown, Held: start == netHeld,
	})
}
