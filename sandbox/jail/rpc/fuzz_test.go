package rpc

import (
	"encoding/binary"
	"testing"
	"time"
)

// packets cuts a fuzzer's input: each packet follows its length, in 16 bits.
func packets(data []byte) (out [][]byte) {
	for len(data) > 2 && len(out) < 100 {
		n := min(int(binary.LittleEndian.Uint16(data)), len(data)-2)
		out = append(out, data[2:2+n])
		data = data[2+n:]
	}
	return out
}

func seeds(f *testing.F) {
	join := func(packets ...[]byte) (out []byte) {
		for _, p := range packets {
			out = append(binary.LittleEndian.AppendUint16(out, uint16(len(p))), p...)
		}
		return out
	}
	long := make([]byte, packetSize)
	f.Add(join(packet(kindCall, 1, "a", 0, 4, "null"), packet(kindPost, 2, "b", 0, 2, "{}"),
		packet(kindCancel, 1, "", 0, 0, "")))
	f.Add(join(packet(kindReply, 1, "", 0, 4, "null"), packet(kindError, 2, "", 0, 2, "{}")))
	f.Add(join(packet(kindCall, 1, "a", 0, packetSize, string(long[:packetSize-headerSize-1])),
		packet(kindRest, 1, "", 0, packetSize, string(long[:17]))))
	f.Add(join(packet(kindError, 1, "", 0, 45, `{"text":"x","errno":2,"codes":["a","b","c"]}`)))
	f.Add([]byte("\xff\xff\xff"))
}

func FuzzAssembler(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		a := assembler{maxMessage: 2 * packetSize, maxFiles: 2}
		defer a.drop()
		s := newSentinels(nil)
		for _, p := range packets(data) {
			m, err := a.add(p, nil)
			if err != nil {
				return
			}
			switch {
			case m == nil && a.begun == nil:
				t.Fatal("a packet is lost")
			case a.begun != nil && cap(a.begun.body) > a.maxMessage:
				t.Fatalf("a message has room for %d bytes", cap(a.begun.body))
			case m == nil:
				continue
			case m.kind == kindError:
				if err := s.decode(m.body); len(err.Error()) == 0 || len(err.Error()) > maxErrorText+200 {
					t.Fatalf("an error has %d bytes", len(err.Error()))
				}
			case len(m.body) > a.maxMessage, len(m.method) > maxMethod,
				(m.kind == kindCall || m.kind == kindPost) != validMethod(m.method):
				t.Fatalf("a message of kind %d has %d bytes and the method %q", m.kind, len(m.body), m.method)
			}
		}
	})
}

// The keeper's end, with calls of its own, ends in order whatever its peer sends.
func FuzzKeeper(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		keeper, peer := against(t, Options{Handler: echo, MaxCalls: 2}, time.Second)
		go func() { _, _ = keeper.Call(t.Context(), "a", nil, nil) }()
		_ = keeper.Post("a", nil)
		for _, p := range packets(data) {
			if peer.send(p) != nil {
				break
			}
		}
		peer.close()
		<-keeper.Done()
		if err := keeper.Close(); err != nil {
			t.Fatal(err)
		}
	})
}
