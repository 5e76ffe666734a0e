package main

import "github.com/spf13/cobra"

// hostVerbs returns the commands that need the state directory, and so run only on the host of the VMs.
func (a *app) hostVerbs() []*cobra.Command {
	return []*cobra.Command{
		a.doctorCommand(), a.kernelCommand(),
		a.sshCommand(), a.sshConfigCommand(), a.sshProxyCommand(), a.topCommand(), a.dfCommand(),
		a.archiveCommand(), a.limitsCommand(), a.netCommand(), a.serveCommand(), a.tokenCommand(), a.gatewayCommand(), a.mcpCommand(), a.benchCommand(), a.demoCommand(),
	}
}
