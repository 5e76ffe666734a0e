package bpf

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/cilium/ebpf"
)

func TestLoad(t *testing.T) {
	begin := time.Now()
	var o AgentObjects
	err := LoadAgentObjects(&o, &ebpf.CollectionOptions{Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats}})
	if err != nil {
		var ve *ebpf.VerifierError
		if errors.As(err, &ve) {
			s := fmt.Sprintf("%+v", ve)
			if len(s) > 6000 {
				s = s[len(s)-6000:]
			}
			t.Fatal(s)
		}
		t.Fatal(err)
	}
	t.Log(time.Since(begin))
	t.Log(o.FromGuest.VerifierLog)
	t.Log(o.ToGuest.VerifierLog)
	o.Close()
}
