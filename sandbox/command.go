package sandbox

import (
	"errors"
	"fmt"
	"slices"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/rootfs/image"
)

// Command completes a command for a VM by what the VM's image says, as container runtimes do: the image's user and
// working directory where the command names none, and its variables before the command's own, which replace those of
// the same name. If the VM has a proxy, ProxyEnvironment comes after the image's. A command with ReplaceEnv keeps its
// environment. Images from Debian packages, directories and tar streams say nothing: their commands stay as they are.
//
// Nothing else is done for an image: its entrypoint is not started (see Entrypoint), and
// `drowse cp`, hooks and guest.Client know nothing of it.
func (b *Sandbox) Command(cmd guest.Cmd) (guest.Cmd, error) {
	s, name := b.host, b.name
	c, err := s.runConfigOf(name)
	if err != nil {
		return cmd, err
	}
	return withConfig(cmd, c), nil
}

// ErrNoEntrypoint says that an image has nothing to run.
var ErrNoEntrypoint = errors.New("the image says no entrypoint and no command")

// MainArgv is what an image starts, as container runtimes have it: its entrypoint with args,
// or with its own command if there are none. It fails with ErrNoEntrypoint.
func MainArgv(c image.RunConfig, args []string) ([]string, error) {
	if len(args) == 0 {
		args = c.Cmd
	}
	argv := slices.Concat(c.Entrypoint, args)
	if len(argv) == 0 {
		return nil, fmt.Errorf("%w: say what to run", ErrNoEntrypoint)
	}
	return argv, nil
}

// Entrypoint is Command with the image's entrypoint: what cmd.Argv has are its arguments, and
// the image's own command if that is empty. It fails with ErrNoEntrypoint.
func (b *Sandbox) Entrypoint(cmd guest.Cmd) (guest.Cmd, error) {
	s, name := b.host, b.name
	c, err := s.runConfigOf(name)
	if err != nil {
		return cmd, err
	}
	if cmd.Argv, err = MainArgv(c, cmd.Argv); err != nil {
		return cmd, fmt.Errorf("VM %s: %w", name, err)
	}
	return withConfig(cmd, c), nil
}

// runConfigOf gives what the image of a VM says about commands.
func (s *Host) runConfigOf(name string) (image.RunConfig, error) {
	r, err := s.State.Load(name)
	if err != nil {
		return image.RunConfig{}, err
	}
	images, err := image.OpenStore(s.State.ImageDir())
	if err != nil {
		return image.RunConfig{}, err
	}
	img, err := images.ByID(r.Boot.ImageID)
	if err != nil {
		return image.RunConfig{}, fmt.Errorf("asking the image of %s for user, directory and variables: %w; a client of the agent (Connect) does without them", name, err)
	}
	// What the VM is told of its proxy replaces what the image says.
	env, err := s.proxyEnvironment(r)
	if err != nil {
		return image.RunConfig{}, err
	}
	c := img.RunConfig
	c.Env = slices.Concat(c.Env, env)
	return c, nil
}

func withConfig(cmd guest.Cmd, c image.RunConfig) guest.Cmd {
	if cmd.User == "" {
		cmd.User = c.User
	}
	if cmd.Dir == "" {
		cmd.Dir = c.Workdir
	}
	if !cmd.ReplaceEnv {
		// The agent takes the last of several of one name.
		cmd.Env = slices.Concat(c.Env, cmd.Env)
	}
	return cmd
}
