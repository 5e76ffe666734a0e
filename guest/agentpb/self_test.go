package agentpb_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

func TestParse_self_request(t *testing.T) {
	for _, tt := range []struct {
		name, line string
		want       agentpb.SelfRequest
		bad        bool
	}{
		{name: "a sleep", line: `{"do":"sleep"}`, want: agentpb.SelfRequest{Do: "sleep"}},
		{name: "a snapshot with a note", line: `{"do":"snapshot","note":"x y"}`, want: agentpb.SelfRequest{Do: "snapshot", Note: "x y"}},
		{name: "a hold", line: `{"do":"hold","seconds":60}`, want: agentpb.SelfRequest{Do: "hold", Seconds: 60}},
		{name: "the end of a hold", line: `{"do":"hold"}`, want: agentpb.SelfRequest{Do: "hold"}},
		{name: "a wake", line: `{"do":"wake","at":"2026-11-23T06:00:00Z"}`, want: agentpb.SelfRequest{Do: "wake", At: time.Date(2026, 11, 23, 6, 0, 0, 0, time.UTC)}},
		{name: "no wake any more", line: `{"do":"wake"}`, want: agentpb.SelfRequest{Do: "wake"}},
		{name: "more time", line: `{"do":"extend","seconds":60}`, want: agentpb.SelfRequest{Do: "extend", Seconds: 60}},
		{name: "more time, of none", line: `{"do":"extend"}`, bad: true},
		{name: "seconds for a wake", line: `{"do":"wake","seconds":60}`, bad: true},
		{name: "a time for a hold", line: `{"do":"hold","at":"2026-11-23T06:00:00Z"}`, bad: true},
		{name: "a time that is none", line: `{"do":"wake","at":"tomorrow"}`, bad: true},
		{name: "nothing", line: ``, bad: true},
		{name: "something else", line: `{"do":"rm"}`, bad: true},
		{name: "another VM", line: `{"do":"sleep","name":"other"}`, bad: true},
		{name: "two requests", line: `{"do":"sleep"}{"do":"sleep"}`, bad: true},
		{name: "a note for a sleep", line: `{"do":"sleep","note":"x"}`, bad: true},
		{name: "a long note", line: `{"do":"snapshot","note":"` + strings.Repeat("x", 257) + `"}`, bad: true},
		{name: "seconds for a snapshot", line: `{"do":"snapshot","seconds":1}`, bad: true},
		{name: "negative seconds", line: `{"do":"hold","seconds":-1}`, bad: true},
		{name: "seconds beyond an int", line: `{"do":"hold","seconds":1e99}`, bad: true},
		{name: "bytes that are no text", line: "{\"do\":\"snapshot\",\"note\":\"\xff\"}", bad: true},
		{name: "a long line", line: `{"do":"sleep"}` + strings.Repeat(" ", 2000), bad: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := agentpb.ParseSelfRequest([]byte(tt.line))
			if errors.Is(err, agentpb.ErrSelf) != tt.bad || err != nil != tt.bad || got != tt.want && !tt.bad {
				t.Errorf("%+v, %v", got, err)
			}
		})
	}
}

func FuzzParseSelfRequest(f *testing.F) {
	for _, s := range []string{`{"do":"sleep"}`, `{"do":"snapshot","note":"x"}`, `{"do":"hold","seconds":5}`, `{"do":"wake","at":"2026-11-23T06:00:00Z"}`, `{"do":"extend","seconds":5}`, `{`, `null`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		r, err := agentpb.ParseSelfRequest(line)
		if err != nil {
			if !errors.Is(err, agentpb.ErrSelf) || r != (agentpb.SelfRequest{}) && r.Do == "" {
				t.Errorf("%+v, %v", r, err)
			}
			return
		}
		if len(r.Note) > agentpb.MaxSelfNote || r.Seconds < 0 || r.Do == "" || !r.At.IsZero() && r.Do != agentpb.SelfWake {
			t.Errorf("%+v was taken", r)
		}
	})
}
