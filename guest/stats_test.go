package guest_test

import (
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/agentpb"
)

func TestStats_are_those_of_the_machine_that_the_agent_runs_on(t *testing.T) {
	c := startVM(t).dial(t)
	got, err := c.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got.UptimeMs <= 0 || got.CPUs < 1 || got.CPU.User+got.CPU.System <= 0 || got.CPU.Idle <= 0 {
		t.Errorf("times are %v ms, %d CPUs, %+v", got.UptimeMs, got.CPUs, got.CPU)
	}
	if got.Tasks < 2 || got.TasksRunning < 1 || got.Forks == 0 {
		t.Errorf("%d tasks, %d run, %d forks", got.Tasks, got.TasksRunning, got.Forks)
	}
	if m := got.Memory; m.Total == 0 || m.Free == 0 || m.Available == 0 || m.Free > m.Total || m.Available > m.Total {
		t.Errorf("memory is %+v", m)
	}
	if len(got.FileSystems) == 0 || got.FileSystems[0].Path != "/" || got.FileSystems[0].Size == 0 || got.FileSystems[0].Free > got.FileSystems[0].Size {
		t.Errorf("file systems are %+v", got.FileSystems)
	}
	var lo bool
	for _, i := range got.Interfaces {
		lo = lo || i.Name == "lo"
	}
	if !lo {
		t.Errorf("interfaces are %+v", got.Interfaces)
	}
	again, err := c.Stats(t.Context())
	if err != nil || again.UptimeMs <= got.UptimeMs || again.Forks < got.Forks {
		t.Errorf("later: %+v, %v", again, err)
	}
}

func TestStats_of_an_agent_that_is_older_say_so(t *testing.T) {
	refusal := message(&ttrpc.Response{Status: status.New(codes.Unimplemented, "no such method").Proto()})
	c := hostileGuest(t, frame(1, 2, 0, refusal))
	if _, err := c.Stats(t.Context()); !errors.Is(err, guest.ErrNoStats) {
		t.Errorf("got %v", err)
	}
}

func TestHostile_stats_are_bounded_and_printable(t *testing.T) {
	const most = math.MaxUint64
	r := &agentpb.StatsResponse{
		UptimeNanos: math.MinInt64, Cpus: math.MaxUint32, Load1: math.MaxUint32, Tasks: math.MaxUint32, Forks: most,
		Cpu: &agentpb.CPUTimes{User: most, Idle: most}, Memory: &agentpb.MemoryUse{Total: most},
	}
	for range 300 {
		long := strings.Repeat("\x1b", 300)
		r.FileSystems = append(r.FileSystems, &agentpb.FileSystem{Path: long, Type: long, Size: most})
		r.Interfaces = append(r.Interfaces, &agentpb.Interface{Name: long, SentBytes: most})
		r.Disks = append(r.Disks, &agentpb.BlockDevice{Name: "x\ny", Reads: most})
	}
	for name, answer := range map[string]*agentpb.StatsResponse{"too much": r, "nothing": {}} {
		got, err := hostileGuest(t, response(1, answer)).Stats(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if len(got.FileSystems) > agentpb.MaxStatsItems || len(got.Interfaces) > agentpb.MaxStatsItems || len(got.Disks) > agentpb.MaxStatsItems || got.UptimeMs < 0 {
			t.Errorf("%s: %d file systems, %d interfaces, %d disks, up %v ms", name, len(got.FileSystems), len(got.Interfaces), len(got.Disks), got.UptimeMs)
		}
		var text strings.Builder
		for _, f := range got.FileSystems {
			text.WriteString(f.Path + f.Type)
		}
		for _, i := range got.Interfaces {
			text.WriteString(i.Name)
		}
		for _, d := range got.Disks {
			text.WriteString(d.Name)
		}
		if strings.ContainsAny(text.String(), "\n\x1b") {
			t.Errorf("%s: not printable: %q", name, text.String())
		}
		if _, err := json.Marshal(got); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
