"""Deployment with Flower: a server and sites (data holders) on separate machines.

    pyrofl study new DIR                        a project folder, which server and sites have
    pyrofl study up DIR --sites 3               everything on this machine, to try it
    pyrofl study serve DIR --host 0.0.0.0 ...   at the server
    pyrofl study join HOST:PORT --data ...      at every site
    pyrofl study exchange DIR --nodes ...       at the server, by files instead of a network
    pyrofl study answer REQUEST --data ...      at a site, which answers a file
    pyrofl study predict STATE --rows ...       at a site, from the state that its clients keep

Flower carries the messages; their content is that of `pyrofl.Server` and `pyrofl.Client`. Sites are
identified by name and never by Flower's number of a node, which changes when the node restarts.
Every message starts a process at the site, so one message has the evaluation of the last round and
the order of the next, of all methods of the project.

`project`, `rows` and `tables` define the study and the rows of a site, `site`
and `coordinator` what both sides do, `apps` how Flower calls them, `processes` and `commands` start
Flower's programs. `file_transport` carries messages
by files. Flower is imported only when one of its programs or apps starts.
"""
