package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/sandbox/instance"
)

// answerPort is where the program of Env.PeerGuest answers in drowse's guest.
const answerPort = 4100

// ResumeAnswer measures the time from the call that restores a VM from a snapshot on disk to the answer of a process in
// it. First the agent answers as for resume_ready. Then the host connects to the process (stage dial), which was there
// before the VM slept, and gets a byte back that it has sent (stage answer). The process is the program that answers in
// the guests of peers, and a peer, which has no agent, is measured to the same answer. In drowse's guest it was asked
// after each earlier wake as well. All else is as for resume_ready.
func ResumeAnswer(ctx context.Context, e Env, o Options) ([]Row, error) {
	r := resumes{
		name: "resume_answer", n: o.N, warmup: o.Warmup, sizes: o.MemoryMiB, params: map[string]any{"depth": o.Depth},
		peers: o.Peers, peerUsedMiB: func(int) int { return o.PeerUsedMiB }, then: askProcess,
	}
	return r.measure(ctx, e, func(ctx context.Context, mib int) (*sleeper, error) {
		return e.sleeperUsed(ctx, mib, o.Depth, func(ctx context.Context, name string) error {
			if err := e.startBusy(ctx, name); err != nil {
				return err
			}
			return e.startAnswering(ctx, name)
		}, e.askOnce)
	})
}

// startAnswering starts the program of Env.PeerGuest in a guest, and waits until it has answered.
func (e Env) startAnswering(ctx context.Context, name string) error {
	program, err := os.Open(e.PeerGuest)
	if err != nil {
		return fmt.Errorf("finding the program that answers: %w: build it with `make build`, and put it beside drowse", err)
	}
	defer program.Close()
	c, err := guest.Dial(ctx, guest.UnixDialer(e.Store.State.VsockPath(name)))
	if err != nil {
		return err
	}
	defer c.Close()
	const path = "/root/answer"
	if err := c.WriteFile(ctx, path, program, guest.WriteOptions{Perm: 0o755}); err != nil {
		return err
	}
	p, err := c.Start(ctx, guest.Cmd{Argv: []string{path, "--vsock", strconv.Itoa(answerPort)}, Detach: true})
	if err != nil {
		return err
	}
	if err := p.Close(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, busyWait)
	defer cancel()
	for {
		silent := e.askOnce(ctx, name)
		if silent == nil {
			return nil
		}
		if err := wait.For(ctx, 500*time.Millisecond); err != nil {
			return fmt.Errorf("waiting for the program in the guest that answers: %w", errors.Join(err, silent))
		}
	}
}

// askOnce asks the program in a running guest.
func (e Env) askOnce(ctx context.Context, name string) error {
	conn, err := guest.UnixDialer(e.Store.State.VsockPath(name))(ctx, answerPort)
	if err != nil {
		return err
	}
	return errors.Join(exchangeByte(ctx, conn), conn.Close())
}

func askProcess(ctx context.Context, in *instance.Instance) (done time.Time, stages map[string]time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, execTimeout)
	defer cancel()
	begin := time.Now()
	conn, err := in.Dial(ctx, answerPort)
	if err != nil {
		return done, nil, fmt.Errorf("connecting to the program in the guest that answers: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	dialed := time.Now()
	err = exchangeByte(ctx, conn)
	done = time.Now()
	return done, map[string]time.Duration{"dial": dialed.Sub(begin), "answer": done.Sub(dialed)}, err
}

// exchangeByte sends a byte on a new connection, and waits until the process has said that it is ready and sent the
// byte back.
func exchangeByte(ctx context.Context, conn net.Conn) error {
	p := peerProcess{conn: conn}
	if _, err := conn.Write([]byte{'!'}); err != nil {
		return fmt.Errorf("sending a byte to the guest: %w", err)
	}
	return errors.Join(p.expect(ctx, PeerReady), p.expect(ctx, '!'))
}
