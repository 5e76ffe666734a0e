// Agentlife runs the life of an agent's workspace as a program that embeds drowse. The workspace is made, gets
// code and a package, serves a page, falls asleep unused, wakes on a request, and is forked three ways. The best
// fork takes its place, another goes back to a snapshot, and all expire. It checks each step and prints its
// figures. It needs root, /dev/kvm, git, and an image with git and python3: `make agentlife` builds everything.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/pool"
)

func main() {
	l := &life{begun: time.Now(), out: os.Stdout}
	flag.StringVar(&l.files, "state", "/var/lib/drowse", "state directory with the image and a kernel; sandboxes are made in one of their own")
	flag.StringVar(&l.program, "drowse", "/usr/local/bin/drowse", "the drowse command, beside its agent")
	flag.StringVar(&l.image, "image", "drowse-agentlife", "an image with git and python3")
	flag.DurationVar(&l.slack, "slack", 3*time.Second, "how long after its 15 s without use the workspace may take until it is asleep: it is looked ten times in these, and then saved")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	err := l.run(ctx)
	stop()
	if err != nil {
		log.Fatal(err)
	}
}

// run makes a state directory, runs all steps, and checks that nothing is left.
func (l *life) run(ctx context.Context) (err error) {
	// A short path, since Unix sockets lie in it.
	dir, err := os.MkdirTemp("", "al")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if l.files, err = filepath.Abs(l.files); err != nil {
		return err
	}
	for _, sub := range []string{"images", "kernels", "cache"} {
		if err := os.Symlink(filepath.Join(l.files, sub), filepath.Join(dir, sub)); err != nil {
			return err
		}
	}
	host, err := sandbox.Open(dir)
	if err != nil {
		return err
	}
	l.launcher = pool.Launcher{Command: []string{l.program + "-vmm"}, Agent: l.program + "-agent"}
	l.store = host.With(l.launcher)
	l.fleet = fleet.New(l.store, fleet.Options{})
	ended := l.supervise(ctx)
	defer func() {
		// Leave no VM behind after an error.
		all, _ := l.store.State.List()
		for _, r := range all {
			err = errors.Join(err, l.store.Sandbox(r.Spec.Name).Delete(context.WithoutCancel(ctx), sandbox.DeleteOptions{Force: true}))
		}
		err = errors.Join(err, ended())
	}()
	for _, step := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"a workspace is got or made", l.make},
		{"a repository is cloned into it", l.clone},
		{"a package is installed from a file", l.install},
		{"a development server is a service", l.serve},
		{"nobody uses it, and it falls asleep", l.idle},
		{"a request for its page wakes it", l.touch},
		{"it is forked three ways, and each is changed and tested", l.forkThree},
		{"the fork that passes takes its place, and the others go", l.promote},
		{"another is taken back to the snapshot before", l.back},
		{"all expires and is pruned", l.expire},
		{"nothing is left", l.nothing},
	} {
		begin := time.Now()
		l.say("== %s", step.name)
		if err := step.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
		l.say("   done in %.1f s", time.Since(begin).Seconds())
	}
	l.say("all was as it should be, in %.0f s", time.Since(l.begun).Seconds())
	return nil
}
