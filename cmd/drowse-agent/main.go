// Command drowse-agent is the agent inside a VM. As PID 1 it sets the machine up and serves. As "drowse-agent
// service" it only serves, in an image with an init of its own. It starts itself as "drowse-agent sftp" to
// transfer files, as "drowse-agent secrets" to serve secrets, and as "drowse-agent layer" to send what the VM has
// written. As "drowse-agent self" it asks the host for something about this VM.
//
// The go:debug lines stop the runtime from following cgroup limits, which would cost a look at /proc every second.
//
//go:debug containermaxprocs=0
//go:debug updatemaxprocs=0
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/agent"
	"github.com/drowse-vm/drowse/guest/agent/early"
	"github.com/drowse-vm/drowse/guest/agent/layer"
	"github.com/drowse-vm/drowse/guest/agent/machine"
	"github.com/drowse-vm/drowse/guest/agent/secretfs"
	"github.com/drowse-vm/drowse/guest/agent/sftp"
	"github.com/drowse-vm/drowse/guest/agentpb"
)

// version is set by the linker: -ldflags "-X main.version=v1.2.3".
var version = "devel"

const (
	// gcPercent keeps the heap small. In a guest with slow page faults, growing the heap costs more than
	// collecting it more often.
	gcPercent = 25
	// exitUsage is the exit status for a wrong invocation.
	exitUsage = 2
)

func main() {
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(gcPercent)
	if os.Getpid() == 1 {
		runInit()
		return
	}
	if len(os.Args) == 2 && os.Args[1] == "version" {
		os.Stdout.WriteString(version + "\n")
		return
	}
	if len(os.Args) == 2 && os.Args[1] == agentpb.SubsystemSFTP {
		if err := sftp.Serve(os.Stdin, os.Stdout, os.Getenv("HOME")); err != nil {
			os.Stderr.WriteString("drowse-agent: " + err.Error() + "\n")
			os.Exit(1)
		}
		return
	}
	if len(os.Args) == 2 && os.Args[1] == agentpb.SubsystemSecrets {
		if err := serveSecrets(); err != nil {
			os.Stderr.WriteString("drowse-agent: " + err.Error() + "\n")
			os.Exit(1)
		}
		return
	}
	if len(os.Args) == 2 && os.Args[1] == agentpb.SubsystemLayer {
		if err := layer.Serve(os.Stdout); err != nil {
			os.Stderr.WriteString("drowse-agent: " + err.Error() + "\n")
			os.Exit(1)
		}
		return
	}
	if len(os.Args) > 1 && os.Args[1] == "self" {
		os.Exit(askHost(os.Args[2:]))
	}
	if len(os.Args) != 2 || os.Args[1] != "service" {
		os.Stderr.WriteString("usage: drowse-agent service|sftp|secrets|layer|self|version\n" +
			"service serves the host of this VM; sftp transfers files by stdin and stdout;\n" +
			"secrets serves the VM's secrets as files until stdin ends;\n" +
			"self asks the host for something about this VM;\n" +
			"layer ends all other processes and writes what the VM has written to stdout;\n" +
			"as PID 1 the command takes no argument.\n")
		os.Exit(exitUsage)
	}
	if err := serve(&machine.Kernel{}, false, func(string) {}); err != nil {
		os.Stderr.WriteString("drowse-agent: " + err.Error() + "\n")
		os.Exit(1)
	}
}

// exitInterrupted is the exit status of "self" if the VM slept meanwhile, or is a copy of the one that asked.
const exitInterrupted = 3

const selfUsage = "usage: drowse-agent self sleep | snapshot [NOTE] | hold DURATION | release |\n" +
	"       wake-at TIME | wake-at never | extend DURATION | fork\n" +
	"asks the host to put this VM to sleep, to take a snapshot of it, not to put it to sleep\n" +
	"for want of use for some time, to wake it at a time, as 2026-11-23T06:00:00Z, to let it last\n" +
	"for some time from now, or to make a copy of it that goes on from this moment. The VM's\n" +
	"owner has to allow it: drowse run --allow-self.\n"

// askHost asks the host for something about this VM.
func askHost(args []string) (exit int) {
	r, err := selfRequest(args)
	if err != nil {
		os.Stderr.WriteString("drowse-agent: " + err.Error() + "\n" + selfUsage)
		return exitUsage
	}
	a, err := agent.AskHost(r)
	switch {
	case errors.Is(err, agent.ErrInterrupted):
		os.Stderr.WriteString("drowse-agent: " + err.Error() + "\n")
		return exitInterrupted
	case err != nil:
		os.Stderr.WriteString("drowse-agent: " + err.Error() + "\n")
		return 1
	}
	if !a.Expires.IsZero() {
		os.Stdout.WriteString(a.Expires.Format(time.RFC3339) + "\n")
	}
	if a.Snapshot != "" {
		os.Stdout.WriteString(a.Snapshot + "\n")
	}
	if a.Child != "" {
		os.Stdout.WriteString(a.Child + "\n")
	}
	return 0
}

func selfRequest(args []string) (r agentpb.SelfRequest, err error) {
	switch {
	case len(args) == 1 && (args[0] == agentpb.SelfSleep || args[0] == agentpb.SelfFork):
		r.Do = args[0]
	case (len(args) == 1 || len(args) == 2) && args[0] == agentpb.SelfSnapshot:
		r.Do = args[0]
		if len(args) == 2 {
			r.Note = args[1]
		}
	case len(args) == 2 && args[0] == "wake-at":
		r.Do = agentpb.SelfWake
		if args[1] != "never" {
			if r.At, err = time.Parse(time.RFC3339, args[1]); err != nil {
				return r, fmt.Errorf("%q is no time, as 2026-11-23T06:00:00Z, and not never", args[1])
			}
		}
	case len(args) == 2 && (args[0] == agentpb.SelfHold || args[0] == agentpb.SelfExtend):
		d, err := time.ParseDuration(args[1])
		if err != nil || d < time.Second || d%time.Second != 0 {
			return r, fmt.Errorf("%q is no duration of whole seconds, as 90s or 10m", args[1])
		}
		r.Do, r.Seconds = args[0], int(d/time.Second)
	case len(args) == 1 && args[0] == "release":
		r.Do = agentpb.SelfHold
	default:
		return r, errors.New("what to ask the host for?")
	}
	return r, nil
}

// serveSecrets runs the process that serves secrets.
func serveSecrets() error {
	// No core dump, and no debugger except root's.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("keep secrets out of core dumps: %w", err)
	}
	runtime.LockOSThread() // a thread owns the ports
	ports, err := secretfs.OpenPorts()
	if err != nil {
		return err
	}
	return secretfs.Serve(agentpb.SecretsDir, ports, os.Stdin, func() { os.Stdout.WriteString(agent.SecretsReady) })
}

// runInit runs PID 1. It never returns, since the kernel would panic.
func runInit() {
	m, err := early.Start()
	if err == nil {
		err = serve(&machine.Kernel{BeforePower: m.ReadOnly, Writable: m.Writable()}, true, m.Announce)
	}
	if err == nil {
		err = errors.New("the agent stopped serving")
	}
	early.Fail(err)
	select {}
}

// serve listens, announces that, and serves until a signal stops it.
func serve(k *machine.Kernel, isInit bool, announce func(version string)) error {
	if err := k.Prepare(); err != nil {
		return err
	}
	if err := machine.HoldBackMonitor(); err != nil {
		os.Stderr.WriteString("drowse-agent: " + err.Error() + "\n")
	}
	if err := agent.LinkSelf(); err != nil {
		os.Stderr.WriteString("drowse-agent: " + err.Error() + "\n")
	}
	report := func(present bool) error { return agent.ReportHooks(agentpb.HooksPort, present) }
	event := func(line string) error { return agent.ReportService(agentpb.ServicesPort, line) }
	s, err := agent.New(agent.Config{Version: version, Init: isInit, Machine: k, ReportHooks: report, ReportService: event})
	if err != nil {
		return err
	}
	l, err := agent.ListenVsock(agentpb.AgentPort)
	if err != nil {
		return err
	}
	forward, err := agent.ListenVsock(agentpb.ForwardPort)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		if err := s.ServeForward(ctx, forward); err != nil {
			os.Stderr.WriteString("drowse-agent: " + err.Error() + "\n")
		}
	}()
	go onSignal(func() {
		if isInit {
			s.Stop(false, 0)
		}
		cancel()
	})
	if err := agent.ReportReady(agentpb.ReadyPort, version); err != nil {
		os.Stderr.WriteString("drowse-agent: " + err.Error() + "\n")
	}
	announce(version)
	return s.Serve(ctx, l)
}

// onSignal calls stop at the first SIGTERM or SIGINT. The kernel sends PID 1 SIGINT for Ctrl-Alt-Del.
func onSignal(stop func()) {
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, syscall.SIGTERM, syscall.SIGINT)
	<-ch
	stop()
}
