package sandbox

import (
	"fmt"
	"slices"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/rootfs/image"
)

// Command completes a command for a VM from the VM's image, as container runtimes do. It adds the image's user and
// working directory if the command has none, and the image's variables before the command's, which replace those
// of the same name. If the VM has a proxy, ProxyEnvironment comes after the image's. A command with ReplaceEnv
// keeps its environment. Images from Debian packages, directories and tar streams have no such settings.
//
// Nothing else comes from an image: its entrypoint is not started (see Entrypoint), and `drowse cp`, hooks and
// guest.Client ignore it.
func (b *Sandbox) Command(cmd guest.Cmd) (guest.Cmd, error) {
	s, name := b.host, b.name
	c, err := s.runConfigOf(name)
	if err != nil {
		return cmd, err
	}
	return withConfig(cmd, c), nil
}

// Entrypoint is Command with the image's entrypoint: cmd.Argv has its arguments; if empty, they are the image's
// own command. It returns image.ErrNoEntrypoint if there is nothing to run.
func (b *Sandbox) Entrypoint(cmd guest.Cmd) (guest.Cmd, error) {
	s, name := b.host, b.name
	c, err := s.runConfigOf(name)
	if err != nil {
		return cmd, err
	}
	if cmd.Argv, err = c.Argv(cmd.Argv); err != nil {
		return cmd, fmt.Errorf("VM %s: %w", name, err)
	}
	return withConfig(cmd, c), nil
}

// runConfigOf returns the settings for commands from a VM's image.
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
	// The variables of the VM's proxy replace the image's.
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
		// If a name occurs several times, the agent uses the last.
		cmd.Env = slices.Concat(c.Env, cmd.Env)
	}
	return cmd
}
