package resolver

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/miekg/dns"
)

// Question is what a resolver asks a server.
type Question struct {
	Name   string         `json:"name"` // in lower case, without a final dot
	Type   uint16         `json:"type"`
	Server netip.AddrPort `json:"server"`
	TCP    bool           `json:"tcp,omitempty"`
}

// Ask sends a question, and returns the answer without reading more of it than its id. It is for a process with rights
// that asks for one without, which reads the answer: see Exchange.
func (q Question) Ask(ctx context.Context) ([]byte, error) {
	m := new(dns.Msg)
	m.SetQuestion(dns.Fqdn(q.Name), q.Type)
	m.SetEdns0(maxUDP, false)
	text, err := m.Pack()
	if err != nil {
		return nil, fmt.Errorf("asking for %s: %w", q.Name, err)
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	network := "udp"
	if q.TCP {
		network = "tcp"
		text = append(binary.BigEndian.AppendUint16(nil, uint16(len(text))), text...)
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, network, q.Server.String())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := c.Write(text); err != nil {
		return nil, err
	}
	if q.TCP {
		var size [2]byte
		if _, err := io.ReadFull(c, size[:]); err != nil {
			return nil, err
		}
		answer := make([]byte, binary.BigEndian.Uint16(size[:]))
		_, err := io.ReadFull(c, answer)
		return answer, err
	}
	for {
		answer := make([]byte, maxUDP)
		n, err := c.Read(answer)
		if err != nil {
			return nil, err
		}
		if n >= 2 && binary.BigEndian.Uint16(answer) == m.Id {
			return answer[:n], nil
		}
	}
}

// Exchange makes an Exchanger of what asks a server.
func Exchange(ask func(context.Context, Question) ([]byte, error)) Exchanger {
	return func(ctx context.Context, m *dns.Msg, server netip.AddrPort) (*dns.Msg, error) {
		name, _ := normal(m.Question[0].Name)
		in := new(dns.Msg)
		for _, tcp := range []bool{false, true} {
			raw, err := ask(ctx, Question{Name: name, Type: m.Question[0].Qtype, Server: server, TCP: tcp})
			if err != nil {
				return nil, err
			}
			in = new(dns.Msg)
			if err := in.Unpack(raw); err != nil {
				return nil, err
			}
			in.Id = m.Id // the asking side has compared its own
			if !in.Truncated {
				break
			}
		}
		return in, nil
	}
}
