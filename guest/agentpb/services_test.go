package agentpb

import (
	"errors"
	"strings"
	"testing"
)

func TestParse_service_event(t *testing.T) {
	e := ServiceEvent{Name: "web", Event: EventEnded, Exit: 137, Signal: 9, Restarts: 3, Lost: 1, Problem: "a \"quoted\" one"}
	got, err := ParseServiceEvent(strings.TrimSuffix(e.Line(), "\n"))
	if err != nil || got != e {
		t.Errorf("got %+v, %v", got, err)
	}
	for _, line := range []string{"", "{}", `{"name":"","event":"ended"}`, `{"name":"a","event":"x"}`, `{"name":"` + strings.Repeat("a", MaxServiceName+1) + `","event":"ended"}`, e.Line() + "x"} {
		if _, err := ParseServiceEvent(line); !errors.Is(err, ErrServiceEvent) {
			t.Errorf("%.30q: got %v, want ErrServiceEvent", line, err)
		}
	}
}

func FuzzParseServiceEvent(f *testing.F) {
	f.Add(ServiceEvent{Name: "web", Event: EventEnded, Exit: 1}.Line())
	f.Add(`{"name":"a","event":"started","lost":18446744073709551615}`)
	f.Fuzz(func(t *testing.T, line string) {
		e, err := ParseServiceEvent(line)
		if err == nil && (e.Name == "" || len(e.Name) > MaxServiceName || len(e.Problem) > MaxServiceText) {
			t.Errorf("%+v passes", e)
		}
	})
}
