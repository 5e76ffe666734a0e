package sandbox

import (
	"fmt"
	"slices"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/rootfs/image"
)

// Command completes a command for a VM by what the VM's image says, as container runtimes
// do: the image's user and working directory where the command names none, and its
// variables before the command's own, which replace those of the same name. A command with
// ReplaceEnv keeps its environment. Images from Debian packages, directories and tar
// streams say nothing: their commands stay as they are.
//
// Nothing else is done for an image: its entrypoint is not started, and `drowse cp`, hooks
// and guest.Client know nothing of it.
func (s *Store) Command(name string, cmd guest.Cmd) (guest.Cmd, error) {
	r, err := s.load(name)
	if err != nil {
		return cmd, err
	}
	images, err := image.OpenStore(s.ImageDir())
	if err != nil {
		return cmd, err
	}
	img, err := images.ByID(r.Boot.ImageID)
	if err != nil {
		return cmd, fmt.Errorf("asking the image of %s for user, directory and variables: %w; `drowse exec --no-image-config` does without them", name, err)
	}
	return withConfig(cmd, img.RunConfig), nil
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
